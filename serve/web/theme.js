// The colours of the page: those of the system, or the reader's choice, which this browser keeps.
// Runs before the first paint, so that the page never shows in the other colours first.

(() => {
  const NAME = "stepdial.theme";
  const CHOICES = ["auto", "light", "dark"];
  const WORDS = { auto: ["Auto", "as the system"], light: ["Light", "light"], dark: ["Dark", "dark"] };

  function kept() {
    try {
      return localStorage.getItem(NAME);
    } catch {
      return null; // a browser that keeps nothing: the choice lasts as long as the page
    }
  }

  let choice = CHOICES.includes(kept()) ? kept() : "auto";

  function apply() {
    const root = document.documentElement;
    if (choice === "auto") delete root.dataset.theme;
    else root.dataset.theme = choice;
    const button = document.getElementById("theme");
    if (!button) return;
    const [word, spoken] = WORDS[choice];
    button.textContent = word;
    button.dataset.choice = choice;
    button.title = "Colours: auto, light or dark";
    button.setAttribute("aria-label", `${word}: colours ${spoken}`);
  }

  apply();
  document.addEventListener("DOMContentLoaded", () => {
    apply();
    document.getElementById("theme").addEventListener("click", () => {
      choice = CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];
      try {
        localStorage.setItem(NAME, choice);
      } catch {
        // See above.
      }
      apply();
    });
  });
})();
