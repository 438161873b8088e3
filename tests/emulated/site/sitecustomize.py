"""Python imports this at its start: the device is there as soon as torch is."""

from tests.emulated.everywhere import install

install()
