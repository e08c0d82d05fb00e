"""Compare the kernels with a memory copy and with other packages."""
