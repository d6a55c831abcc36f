cd /work/wt/sglang && ulimit -v 9000000; OMP_NUM_THREADS=1 PYTHONPATH=$PWD/src nice taskset -c 2,3 /work/main/.venv/bin/python -m pytest -q -p no:cacheprovider "$@"
