"""Behind ``spark simulate``: what it reads, what it runs, what it says."""
