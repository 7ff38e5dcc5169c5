"""`python -m pagebinder` is the `pagebinder` command."""

import sys

EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def main() -> None:
    """Entry point of the installed command: also while the command line itself is imported, Ctrl-C is one line."""
    try:
        from pagebinder.cli import main as run

        run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)


if __name__ == "__main__":
    main()
