-- schedule: move timelines between the sets, and wake sleeping workers if something is due earlier than it was.
--
-- Needs    keys

local before -- when the next timeline was due before this script changed anything; nil: it has not
local earliest = math.huge -- the earliest time for which this script has placed a timeline

-- Return when the next timeline is due: -1 if one is ready.
local function head()
  if call('ZCARD', ready) > 0 then
    return -1
  end
  local first = tonumber(call('ZRANGE', waiting, 0, 0, 'WITHSCORES')[2]) or math.huge
  if has_mutes then -- of which one may end first
    local looks = tonumber(call('ZRANGE', tag .. 'mutes', 0, 0, 'WITHSCORES')[2]) or NEVER_MS
    first = looks < NEVER_MS and math.min(first, looks) or first
  end
  return first
end

-- Take a timeline out of its set; return whether it was in one.
local function leave(key)
  before = before or head()
  if call('ZREM', leased, key) > 0 or call('ZREM', ready, key) > 0 then
    return true
  end
  call('ZREM', postponed, key)
  return call('ZREM', waiting, key) > 0
end

-- Schedule a timeline that is in `waiting` (`waits`) or in no set; return whether it is ready. One that is muted is kept
-- out of the schedule, and a claim looks when its records end.
local function place(key, due, waits)
  before = before or head()
  if has_mutes then
    -- Needs    mutes
    local ends = mute_of(key)
    if ends and ends > now then
      call('HSET', metas .. key, 'due', due)
      call('ZADD', mutes, now, key)
      earliest = math.min(earliest, now)
      call('ZREM', waiting, key)
      return false
    end
  end
  if due > now then
    earliest = math.min(earliest, due)
    call('ZADD', waiting, due, key)
    return false
  end
  earliest = -1
  if waits then
    call('ZREM', waiting, key)
  end
  call('ZADD', ready, due, key)
  return true
end

-- Wake the sleeping workers if the schedule has become earlier. What was placed early may have been moved again since.
local function wake()
  if before and earliest < before and head() < before then
    try('XADD', tag .. 'wake', 'MAXLEN', 1, '*', 'at', now)
  end
end
