"""Read and write weights: our own directories, other libraries' files, the hub."""
