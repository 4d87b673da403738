"""One process's stay in a link: from taking up the run directory to the outcome."""
