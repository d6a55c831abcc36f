"""Number formats of low precision: FP8, MXFP8 and NVFP4, in plain torch (docs/fp8.md)."""
