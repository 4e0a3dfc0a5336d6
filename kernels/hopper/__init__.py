"""What the Gluon kernels for Hopper (compute capability 9.0) share: TMA, rings of tiles in shared memory, tiles in registers."""
