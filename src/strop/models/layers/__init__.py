"""The layers of a decoder with fewer passes over memory than the modules of Transformers, and the same roundings."""
