// Faults of the page itself, told to the reader in a banner: also those of scripts that do not load.
// A classic script, so that it works where a module does not.

(() => {
  const banner = document.getElementById("banner");

  function report(message) {
    document.getElementById("banner-text").textContent =
      `This page has hit an error: ${message}. Reload it; if the error stays, please report it.`;
    banner.hidden = false;
  }

  const trimmed = (message) => String(message).replace(/^Uncaught (\(in promise\) )?/, "").replace(/\.$/, "");

  // Captured: a script or a style that cannot be loaded is told to its element only.
  window.addEventListener("error", (event) => {
    const source = event.target?.src ?? event.target?.href;
    if (source) report(`${source} could not be loaded`);
    else report(trimmed(event.message || "a script failed"));
  }, true);
  window.addEventListener("unhandledrejection", (event) => report(trimmed(event.reason?.message ?? event.reason)));
  document.getElementById("banner-close").addEventListener("click", () => { banner.hidden = true; });
})();
