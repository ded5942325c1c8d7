"""The parts of `check_device.py`: what they measure, and the file of their rows."""
