"""`python -m crossdock.cli`, and `torchrun ... -m crossdock.cli verify`."""

from . import main

main()
