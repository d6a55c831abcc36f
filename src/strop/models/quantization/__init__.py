"""Low-precision number formats: FP8, MXFP8 and NVFP4, in plain torch (docs/fp8.md)."""
