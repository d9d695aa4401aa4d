"""What the kernels need to know of the machine: its processor, its switches, its memory."""
