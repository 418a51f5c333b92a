"""The benchmarks of stio: `python -m benchmarks.load`, see README.md."""
