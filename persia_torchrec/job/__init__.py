"""Who is in a job and alive: registry, coordinator, members, supervisors, scripts."""
