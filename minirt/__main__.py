"""`python -m minirt`: the command line."""

from minirt.cli.app import main

if __name__ == "__main__":
    main()
