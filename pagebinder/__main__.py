"""`python -m pagebinder` is the `pagebinder` command."""

from pagebinder.cli import main

if __name__ == "__main__":
    main()
