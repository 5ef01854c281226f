"""REST for people: `/v1`. Every replica answers reads; the leader makes the wishes true."""
