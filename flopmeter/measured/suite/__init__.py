"""A fixed set of kernels and programs, measured on a machine and predicted for it: `flopmeter measure`.

cases.py says what a case is, kernels.py and programs.py which there are; stopwatch.py and nvml.py measure, runner.py
writes the file that run_file.py reads; prediction.py makes a case again on meta, beside.py puts both in a table.
"""
