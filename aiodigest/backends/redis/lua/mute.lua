-- mute: deliver nothing of timelines until a time, or until they are unmuted. A delivery under way ends.
--
-- Flags     begins-namespace, repeatable, replicated
-- Parts     move by hand
-- Commands  HDEL HGET HGETALL HLEN HMGET HSET LLEN LRANGE PEXPIRE TIME XADD ZADD ZCARD ZRANGE ZREM ZSCORE
-- Reply     [number...]
-- KEYS[1]   layout (guard)
-- ARGV[1]   expected (guard)
-- ARGV[2]   now (clock)
-- ARGV[3]   limits (limits): of the engine
-- ARGV[4]   only_new (flag): leave those alone that are muted already
-- then      for each: key; 'at', 'delay' or '' (without end); the time or the delay, ms; 1 to drop what is added
-- Returns   for each: 1 if it is muted now, 0 if that time has passed, so that it is unmuted, or if it was left alone; or
--           the text of an error
--
-- Needs     guard clock tick state unmuting

local limits, only_new = parse_limits(ARGV[3]), ARGV[4] == '1'

local function mute(key, mode, value, drops)
  local held, problem = load_all(key)
  if not held then
    return problem
  end
  local state, due = state_of(key)
  local were = mute_of(key)
  local ends = mode == 'at' and value + shift or mode == 'delay' and now + value or NEVER_MS
  if were and only_new then
    return 0
  elseif ends <= now then
    if were then
      unmute(held, now, state == 'muted', limits.max_size, limits.ttl)
    end
    return 0
  end
  before = before or head()
  note_mute(key, ends, drops)
  if state == 'waiting' or state == 'ready' then
    due = tonumber(call('ZSCORE', postponed, key)) or due
    leave(key)
    place(key, due)
  end
  if state then
    need_mutes(held, true)
    touch_muted(held, ends, held.own and parse_limits(held.own).ttl or limits.ttl)
  end
  local looks = state and state ~= 'leased' and math.min(ends, held['end']) or ends
  call('ZADD', mutes, looks, key)
  earliest = math.min(earliest, looks)
  save(held, FIELDS)
  return 1
end

local answers = {}
for cursor = 5, #ARGV, 4 do
  answers[#answers + 1] = mute(ARGV[cursor], ARGV[cursor + 1], tonumber(ARGV[cursor + 2]), ARGV[cursor + 3] == '1')
end
wake()
return answers
