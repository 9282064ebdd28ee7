"""What the parts ask of torch: attention kernels, rotation, masks, the cache, expert dispatch."""
