"""Runs kernels compiled for Hopper on a CPU, and checks the order of their accesses to shared memory.

The kernels' PTX becomes C++, which runs on the tensors of the call. Triton's interpreter cannot run Gluon kernels, and
compute-sanitizer needs a GPU.

`MINIRT_EMULATE=SEED pytest tests/kernels/attention/test_decode_fp8.py …` runs tests this way. The seed determines how warps and
copies take turns. `MINIRT_EMULATE_WITHOUT=fence.proxy,…` leaves out instructions, which shows whether their absence is found.
`launch` compiles and calls kernels, `translate` translates PTX, and `block.h` is the runtime of a translated kernel. They support
the instructions of the Hopper kernels and stop at any other. Results equal a GPU's up to rounding. Times mean nothing.
"""
