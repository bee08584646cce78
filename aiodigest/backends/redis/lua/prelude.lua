-- Shared helpers, put before every script of timelines (SHARED in scripts.py).
--
-- KEYS[1]  the shard's layout, "{tag}:layout"; every other key is made from its tag, so that all are in one slot
-- ARGV[1]  the version of the layout that the caller knows, "SCHEMA:SHARDS:EPOCH", and ":draining" after it if
--          another one takes the adds
-- ARGV[2]  now in milliseconds, or '' for the server's clock
--
-- Where the layout is another one, a script does nothing and answers the error "LAYOUT" with what is stored. Where there
-- is none, only those that begin a namespace do (CREATES, which scripts.py sets); the others find an empty one.
-- A timeline's fields are named in FIELDS; its states and transitions are those of reference.py.

local call, try = redis.call, redis.pcall

local layout = KEYS[1]
local tag = string.sub(layout, 1, -7)
-- While a cluster moves a slot key by key, a key that has moved and one that is missing look the same: reading one that
-- never exists fails then, here, before anything is done. So half a shard is never taken for a whole one.
call('HGET', tag .. 'nothing', 'version')
local version = call('HGET', layout, 'version')
if version ~= ARGV[1] and (version or CREATES) then
  return redis.error_reply('LAYOUT ' .. (version or 'none'))
end

local waiting, ready, leased = tag .. 'waiting', tag .. 'ready', tag .. 'leased'

local now = tonumber(ARGV[2])
if not now then
  local clock = call('TIME')
  now = clock[1] * 1000 + math.floor(clock[2] / 1000)
end

local SLICE = 1000 -- how much is read or pushed at once, and how many entries a script reads before it stops
local MOVES = 200 -- timelines that are made ready at once
local HOUR = 3600000
local ECHO = HOUR / 12 -- how long a timeline without records remembers what its last outcome was answered
local LETTER_TTL = 30 * 24 * HOUR
local COUNTERS = {'digests', 'delivered', 'dropped', 'aged', 'expired', 'buried', 'letters_dropped'}
local scanned = 0 -- entries read so far by compactions and counts

-- A number in a text: Lua would print a large one with an exponent. (As an argument of a call it has all its digits.)
local function whole(number)
  return string.format('%.0f', number)
end

local counted = {}

local function count(name, number)
  counted[name] = (counted[name] or 0) + number
end

local function write_counts()
  for name, number in pairs(counted) do
    if number ~= 0 then
      try('HINCRBY', layout, name, number) -- what another program wrote may be no number; all else has been done
    end
  end
end

local function parse_limits(text)
  local capacity, max_size, max_age, ttl = string.match(text, '^(%d+) (%d+) (%d+) (%d+)$')
  return {
    capacity = tonumber(capacity), max_size = tonumber(max_size), max_age = tonumber(max_age), ttl = tonumber(ttl),
  }
end

-- The schedule

local head_before -- when the next timeline was due before this script changed the schedule

local function head()
  if call('ZCARD', ready) > 0 then
    return -1
  end
  return tonumber(call('ZRANGE', waiting, 0, 0, 'WITHSCORES')[2]) or math.huge
end

local function watch_head()
  head_before = head_before or head()
end

-- End a script: write what it counted, and wake the sleeping workers if it has made the schedule earlier.
local function finish()
  write_counts()
  if head_before and head_before >= 0 and head() < head_before then
    try('XADD', tag .. 'wake', 'MAXLEN', 1, '*', 'at', now)
  end
end

local function state_of(key)
  for _, state in ipairs({'ready', 'leased', 'waiting'}) do
    local due = call('ZSCORE', tag .. state, key)
    if due then
      return state, tonumber(due)
    end
  end
end

local function leave(key)
  watch_head()
  return call('ZREM', leased, key) > 0 or call('ZREM', ready, key) > 0 or call('ZREM', waiting, key) > 0
end

-- Schedule a timeline, which now is in `state` (nil: in none), and say whether it is ready.
local function place(key, due, state)
  watch_head()
  local target = due <= now and 'ready' or 'waiting'
  if state and state ~= target then
    call('ZREM', tag .. state, key)
  end
  call('ZADD', tag .. target, due, key)
  return target == 'ready'
end

-- Make a slice of what is in `from` with a score up to `latest` ready, its score kept; answers keys and scores.
local function promote(from, latest)
  local moved = call('ZRANGEBYSCORE', from, '-inf', latest, 'WITHSCORES', 'LIMIT', 0, MOVES)
  if #moved > 0 then
    local pairs_of = {}
    for index = 1, #moved, 2 do
      pairs_of[index], pairs_of[index + 1] = moved[index + 1], moved[index]
    end
    call('ZREMRANGEBYRANK', from, 0, #moved / 2 - 1)
    call('ZADD', ready, unpack(pairs_of))
  end
  return moved
end

-- The keys of a timeline

local logs, opens, metas = tag .. 'log:', tag .. 'open:', tag .. 'meta:'

local function log_of(key)
  return logs .. key
end

local function open_of(key)
  return opens .. key
end

local function meta_of(key)
  return metas .. key
end

-- Lists of entries

local UNSTAMPED = 16 -- a flag: the server fills in the time of arrival. The next one: a trace context follows the id
local CONTEXT = 25 -- bytes of it

-- The id of an entry; one that cannot be read stands for itself. See wire.py.
local function identity(entry)
  local flags, high, low = string.byte(entry), string.byte(entry, 10, 11)
  if low and flags % 16 == 1 and flags < 4 * UNSTAMPED then -- version 1, and no flag that is not known
    local stop = 11 + high * 256 + low
    if #entry >= stop + (flags >= 2 * UNSTAMPED and CONTEXT or 0) then
      return string.sub(entry, 12, stop)
    end
  end
  return entry
end

-- Append to `kept` the last entry of each id among the first `length` of a list, newest first, unless it is `seen`.
local function collect(kept, seen, list, length)
  local stop = length - 1
  while stop >= 0 do
    local start = math.max(0, stop - SLICE + 1)
    local entries = call('LRANGE', list, start, stop)
    for index = #entries, 1, -1 do
      local id = identity(entries[index])
      if not seen[id] then
        seen[id] = true
        kept[#kept + 1] = entries[index]
      end
    end
    stop = start - 1
  end
  scanned = scanned + length
  return kept
end

local function distinct(list, length)
  return #collect({}, {}, list, length)
end

-- Push the first `length` of `kept` (newest first) with a command that ends with the oldest or the newest.
local function push_back(list, kept, length)
  for first = length, 1, -SLICE do
    local slice = {}
    for index = first, math.max(1, first - SLICE + 1), -1 do
      slice[#slice + 1] = kept[index]
    end
    call('RPUSH', list, unpack(slice))
  end
end

local function push_front(list, kept)
  for first = 1, #kept, SLICE do
    call('LPUSH', list, unpack(kept, first, math.min(#kept, first + SLICE - 1)))
  end
end

-- Make `kept` (newest first) all that a list holds, for `lifetime` milliseconds.
local function rewrite(list, kept, length, lifetime)
  call('UNLINK', list)
  push_back(list, kept, length)
  if length > 0 then
    call('PEXPIRE', list, lifetime)
  end
end

-- Timelines

local FIELDS = {
  'end', 'token', 'done', 'attempts', 'iteration', 'last', 'cool', 'dropped', 'open_dropped', 'id', 'part', 'cut',
  'frozen', 'parted', 'since', 'error', 'flush', 'own',
}
local NUMBERS = {
  ['end'] = 0, attempts = 0, iteration = 0, last = 0, cool = 0, dropped = 0, open_dropped = 0, part = 0, cut = 0,
  since = 0,
}
local ABSENT = {__index = NUMBERS} -- a number that is not stored is 0
local DELIVERY = {'id', 'token', 'attempts', 'open_dropped', 'part', 'cut', 'frozen', 'parted', 'since', 'error'}

local function is_number(value)
  return #value < 16 and string.find(value, '^%-?%d+$')
end

local fitting = {} -- limits that were looked at already: many timelines have the same

local function are_limits(value)
  if fitting[value] == nil then
    local limits = parse_limits(value)
    fitting[value] = limits.ttl and limits.capacity > 0
      and math.max(limits.ttl, limits.max_age, limits.capacity) < 1e15 or false
  end
  return fitting[value]
end

-- Take over a field if a script can reckon with it. Another program may have written anything, on which it would break
-- off.
local function thaw_field(held, name, value)
  if NUMBERS[name] then
    value = is_number(value) and tonumber(value)
  elseif name == 'own' then
    value = are_limits(value) and value
  end
  if value then
    held[name], held.stored[name] = value, value
    return
  end
  held.problem = "ERR the field '" .. name .. "' of its meta is not of aiodigest"
end

local function thaw(key, fields)
  local held = setmetatable({key = key, stored = {}}, ABSENT)
  for index = 1, #fields, 2 do
    thaw_field(held, fields[index], fields[index + 1])
  end
  return held
end

-- What is kept of a timeline beside its entries; or nil and the error of a key that cannot be read.
local function load(key)
  local fields = try('HGETALL', meta_of(key))
  if fields.err then
    return nil, fields.err
  end
  local held = thaw(key, fields)
  return not held.problem and held or nil, held.problem
end

-- The same with the lengths of both lists, so that every key of the timeline has been read before the first write.
local function load_all(key)
  local held, problem = load(key)
  if not held then
    return nil, problem
  end
  local logged, opened = try('LLEN', log_of(key)), try('LLEN', open_of(key))
  if type(logged) == 'table' or type(opened) == 'table' then
    return nil, (type(logged) == 'table' and logged or opened).err
  end
  held.logged, held.opened = logged, opened
  return held
end

-- How long the keys of a timeline live at least: until its end has surely been met and counted.
local function lifetime(held, ttl)
  return math.max(2 * ttl, held['end'] - now + ttl)
end

-- Renew the end of a timeline's records; rewritten late by one part in 64, so that most touches write nothing.
local function touch(held, ttl)
  if held['end'] < now + ttl then
    held['end'] = now + ttl + math.floor(ttl / 64)
    held.touched = 2 * ttl
  end
end

-- Write those of `names` (nil: of all fields) that differ from what is stored, and renew the expiries that are due.
local function save(held, names)
  local changed, gone = {}, {}
  local stored = held.stored
  for _, name in ipairs(names or FIELDS) do
    local value = rawget(held, name)
    if value == 0 or value == '' then
      value = nil
    end
    if value ~= stored[name] then
      if value then
        changed[#changed + 1] = name
        changed[#changed + 1] = value
      else
        gone[#gone + 1] = name
      end
    end
  end
  local meta = meta_of(held.key)
  if #changed > 0 then
    call('HSET', meta, unpack(changed))
  end
  if #gone > 0 then
    call('HDEL', meta, unpack(gone))
  end
  if held.touched then
    call('PEXPIRE', log_of(held.key), held.touched)
    call('PEXPIRE', open_of(held.key), held.touched)
    call('PEXPIRE', meta, held.touched)
  elseif held.idle or not next(held.stored) then
    -- without records: as long as its cool-down, and a while for a late close to hear its answer
    call('PEXPIRE', meta, math.max(held.cool - now, 0) + ECHO)
  end
end

-- Deliveries

-- 'held' if the token and digest id still name the delivery; else what its outcome was answered before, or 'lost'.
local function fenced(held, token, digest_id)
  if held.id and held.token == token and held.id == digest_id then
    return 'held'
  end
  if held.done then
    local done_token, done_id, status, next_id, left = string.match(held.done, '^(%S*) (%S*) (%S*) (%S*) (%d+)$')
    if done_token == token and done_id == digest_id then
      return status, next_id, tonumber(left)
    end
  end
  return 'lost', '', 0
end

local function answer(held, token, digest_id, status, next_id, left)
  held.done = string.format('%s %s %s %s %s', token, digest_id, status, next_id, whole(left))
end

local function end_delivery(held)
  for _, name in ipairs(DELIVERY) do
    held[name] = nil
  end
  call('UNLINK', open_of(held.key))
end

-- Schedule what came since a digest that is gone.
local function settle(held, max_size, ttl)
  local flush = held.flush
  leave(held.key)
  held.flush = nil
  if held.logged == 0 then
    held['end'], held.dropped, held.own, held.idle = 0, 0, nil, true
    return
  end
  touch(held, ttl)
  local full = max_size > 0 and held.logged >= max_size and distinct(log_of(held.key), held.logged) >= max_size
  place(held.key, (flush or full) and now or math.max(held.cool, now))
end

-- Claims and renewals leave their times in the layout. After a gap of more than half a lease, whose holders could not
-- renew, nothing is recovered for one more lease. Answers until when.
local function watch_gap(lease)
  local marks = call('HMGET', layout, 'seen', 'hold')
  local seen, hold = tonumber(marks[1]) or 0, tonumber(marks[2]) or 0
  if seen > 0 and math.abs(now - seen) > math.floor(lease / 2) and hold <= now then
    hold = now + lease
  end
  hold = hold == hold and math.min(hold, now + lease) or now + lease -- another program may have written "nan"
  call('HSET', layout, 'seen', now, 'hold', hold, 'lease', lease)
  return hold
end
