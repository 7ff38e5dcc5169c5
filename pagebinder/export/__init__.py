"""Out of Pagebinder: semantic graphs for other runtimes."""
