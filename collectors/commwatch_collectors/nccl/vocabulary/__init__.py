"""What NCCL, RCCL and their plug-ins mean by their warnings, and what mends the cause: tables, and two functions that read them."""
