"""Jobs for a cluster: what they ask for, their scripts, and how they come into the queue."""
