-- postpone: let digests that were claimed, and may not run now, wait uncharged; the times when they were due are kept.
--
-- Flags     repeatable
-- Parts     deliver
-- Commands  HDEL HGET HGETALL HLEN HMGET HSET PERSIST PEXPIRE TIME XADD ZADD ZCARD ZRANGE ZREM
-- Reply     [number...]
-- KEYS[1]   layout (guard)
-- ARGV[1]   expected (guard)
-- ARGV[2]   now (clock)
-- ARGV[3]   limits (limits): of the engine
-- then      for each: key; token; digest id; when it was due, ms; for how long to wait, ms (0: it is ready again)
-- Returns   for each: 1, 0 if the lease is lost, or the text of an error
--
-- Needs     guard clock timelines schedule fencing

call('PERSIST', layout)
-- Needs     tick

local limits = parse_limits(ARGV[3])

local function postpone(key, token, digest_id, due, delay)
  local held, answered = load_held(load, key, token, digest_id)
  if not held then
    return answered
  end
  held.token = nil
  if held.flush then -- it was asked for since, so it is tried again, now whatever its hours
    held.flush, held.pass, delay = nil, '1', 0
  end
  touch(held, delay + (held.own and parse_limits(held.own) or limits).ttl) -- it must still be there when its time comes
  leave(key)
  local is_muted = false
  if has_mutes then
    -- Needs   mutes
    is_muted = (mute_of(key) or 0) > now
  end
  if not place(key, delay > 0 and not is_muted and now + delay or math.min(due, now)) and not is_muted then
    call('ZADD', postponed, due, key)
  end
  answer(held, token, digest_id, 'released', '', 0)
  save(held, FIELDS)
  return 1
end

local answers = {}
for cursor = 4, #ARGV, 5 do
  local due, delay = tonumber(ARGV[cursor + 3]), tonumber(ARGV[cursor + 4])
  answers[#answers + 1] = postpone(ARGV[cursor], ARGV[cursor + 1], ARGV[cursor + 2], due, delay)
end
wake()
return answers
