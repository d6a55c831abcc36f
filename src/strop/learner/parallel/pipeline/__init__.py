"""Pipeline parallelism: the layers of a network are split into stages over ranks."""
