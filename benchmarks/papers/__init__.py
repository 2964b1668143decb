"""The experiments of the papers: published figures, measured runs, and the page that shows both."""
