"""HOW: snapshot in memory, persist in the background, commit, restore."""
