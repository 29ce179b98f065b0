"""``python -m hf_kvquant``: the command line, for launchers that take a module (``accelerate launch -m``)."""

from hf_kvquant.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
