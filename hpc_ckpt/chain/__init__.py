"""Chains of links: what the user and the site ask for, planned, rendered, submitted and run."""
