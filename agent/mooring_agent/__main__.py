"""`mooring` on the command line. Says what to install when only the trainer's side is here."""

import sys


def main() -> None:
    try:
        from mooring_agent.cli import cli
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - nothing else can be imported
        print("hint: the command line needs the agent's packages: pip install 'mooring[agent]'", file=sys.stderr)  # noqa: T201
        sys.exit(2)
    cli(prog_name="mooring")


if __name__ == "__main__":
    main()
