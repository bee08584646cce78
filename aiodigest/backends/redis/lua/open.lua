-- open: claim one timeline, if it is ready.
--
-- Commands  HDEL HGET HGETALL HINCRBY HLEN HMGET HSET LLEN LRANGE PERSIST PEXPIRE RENAME RPUSH TIME UNLINK ZADD ZCARD
--           ZMSCORE ZREM ZSCORE
-- Reply     nil | text | [text, text, text, number, number, number, number, number, number, number, text, number, number,
--           text, number, [text...]]
-- KEYS[1]   layout (guard)
-- ARGV[1]   expected (guard)
-- ARGV[2]   now (clock)
-- ARGV[3]   key (text)
-- ARGV[4]   lease (int, ms)
-- ARGV[5]   limits (limits): of the engine
-- ARGV[6]   nonce (text): for the names of the token and the digest
-- ARGV[7]   features (text): that the caller knows, separated by spaces
-- Returns   the lease, or nothing (also if all of it was delivered already); the text of an error if the timeline is
--           broken, or "NEEDS" and a feature
--
-- Needs     guard clock lease needs

call('PERSIST', layout)
-- Needs     tick

local key, lease, limits, nonce = ARGV[3], tonumber(ARGV[4]), parse_limits(ARGV[5]), ARGV[6]
local features = ARGV[7]
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
if has_mutes then -- `maintenance` has made it ready
  -- Needs   mutes
  local ends = mute_of(key)
  if ends and ends > now then
    return false
  end
end
local need = unknown_need(held, features)
if need then
  return 'NEEDS ' .. need
end
return take(held, due, lease, limits, nonce .. '-1', DIGEST_BYTES)
