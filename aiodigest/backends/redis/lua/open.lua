-- open: claim one timeline, if it is ready.
--
-- ARGV[3]  key
-- ARGV[4]  lease, ms
-- ARGV[5]  limits of the engine: "capacity max_size max_age ttl", ms
-- ARGV[6]  nonce for the names of the token and the digest
-- Returns  the lease, or nothing; the text of an error if the timeline is broken

call('PERSIST', layout)

local key, lease, limits, nonce = ARGV[3], tonumber(ARGV[4]), parse_limits(ARGV[5]), ARGV[6]
local due = tonumber(call('ZSCORE', ready, key))
if not due then
  return false
end
local held, problem = load_all(key)
if not held then
  return problem
end
if held.logged + held.opened == 0 then
  return false
end
local fields = take(held, due, lease, limits, nonce .. '-1')
write_counts()
return fields
