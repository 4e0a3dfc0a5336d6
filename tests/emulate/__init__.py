"""Kernels on a CPU as they are compiled for Hopper: their PTX as C++, on the tensors of the call, and the order of their accesses
to shared memory checked. Triton's interpreter cannot run what is written in Gluon, and compute-sanitizer needs a GPU.

`MINIRT_EMULATE=SEED pytest tests/kernels/attention/test_decode_fp8.py …` runs tests so; the seed decides how warps and copies
take turns. With `MINIRT_EMULATE_WITHOUT=fence.proxy,…` instructions are left out, which shows what is found where they lack.
`launch` compiles and calls, `translate` reads PTX, `block.h` is what a kernel runs on. It knows the instructions that attention
needs, and stops at any other. The results are a GPU's but for roundings; a time says nothing.
"""
