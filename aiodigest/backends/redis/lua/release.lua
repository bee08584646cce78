-- release: give leases back; no attempt is charged.
--
-- Flags     repeatable
-- Parts     deliver
-- Commands  HDEL HGET HGETALL HLEN HMGET HSET PERSIST PEXPIRE TIME XADD ZADD ZCARD ZRANGE ZREM
-- Reply     [number...]
-- KEYS[1]   layout (guard)
-- ARGV[1]   expected (guard)
-- ARGV[2]   now (clock)
-- ARGV[3]   started (flag): the callbacks had started, so that the outcome is unknown
-- then      for each: key, token, digest id
-- Returns   for each: 1, 0 if the lease is lost, or the text of an error
--
-- Needs     guard clock timelines schedule fencing

call('PERSIST', layout)
-- Needs     tick

local started = ARGV[3] == '1'

local function release(key, token, digest_id)
  local held, answered = load_held(load, key, token, digest_id)
  if not held then
    return answered
  end
  held.frozen = (held.frozen or started) and '1' or nil
  held.token = nil
  leave(key)
  place(key, now)
  answer(held, token, digest_id, 'released', '', 0)
  save(held, FIELDS)
  return 1
end

local answers = {}
for cursor = 4, #ARGV, 3 do
  answers[#answers + 1] = release(ARGV[cursor], ARGV[cursor + 1], ARGV[cursor + 2])
end
wake()
return answers
