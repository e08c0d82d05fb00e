"""Other people's calling conventions over ropelab's functions, a thin file each."""
