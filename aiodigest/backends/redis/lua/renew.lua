-- renew: extend leases, also those that have ended and were not claimed by another.
--
-- Flags     begins-namespace, repeatable
-- Parts     deliver
-- Commands  HGET HGETALL HLEN HMGET HSET PERSIST TIME ZADD ZCARD ZRANGE ZREM
-- Reply     [number...]
-- KEYS[1]   layout (guard)
-- ARGV[1]   expected (guard)
-- ARGV[2]   now (clock)
-- ARGV[3]   lease (int, ms)
-- then      for each: key, token, digest id
-- Returns   for each: 1, 0 if the lease is lost, or the text of an error
--
-- Needs     guard clock timelines schedule fencing gap

call('PERSIST', layout)
-- Needs     tick

local lease = tonumber(ARGV[3])
local answers = {}
watch_gap(lease)
for cursor = 4, #ARGV, 3 do
  local key, token, digest_id = ARGV[cursor], ARGV[cursor + 1], ARGV[cursor + 2]
  local held, problem = load(key)
  if not held then
    answers[#answers + 1] = problem
  elseif fenced(held, token, digest_id) == 'held' then
    leave(key)
    call('ZADD', leased, now + lease, key)
    answers[#answers + 1] = 1
  else
    answers[#answers + 1] = 0
  end
end
return answers
