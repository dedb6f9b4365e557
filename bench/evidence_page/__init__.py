"""What docs/evidence.md says: records, the regret map, the other groups, and what to conclude."""
