"""`python -m hf_dynspec.commands`, for launchers that take a module, such as `accelerate launch`."""

from . import main

if __name__ == "__main__":
    main()
