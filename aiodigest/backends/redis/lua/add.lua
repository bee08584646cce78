-- add: append records to their logs, and open or push the windows of their timelines.
--
-- Flags     begins-namespace, replicated
-- Parts     add
-- Commands  HDEL HGET HINCRBY HMGET HSET LRANGE LTRIM PEXPIRE RPUSH TIME UNLINK XADD ZADD ZCARD ZRANGE ZREM ZSCORE
-- Reply     [number...]
-- KEYS[1]   layout (guard)
-- ARGV[1]   expected (guard)
-- ARGV[2]   now (clock)
-- ARGV[3]   kinds (int): how many different terms follow
-- then      for each of these: delays "initial increment maximum", ms; limits "capacity max_size max_age ttl", times
--           in ms; 1 if these limits are the timeline's own
-- then      for each add: key; number of its terms, from 1; entry
-- Returns   for each add: 1 if it made its timeline ready, 0 if not, or the text of its error. Fewer than asked for if
--           much had to be compacted; the rest was not looked at.
--
-- Needs     guard clock tick budget window

local kinds = tonumber(ARGV[3])
local all_terms = {}
local cursor = 4
for index = 1, kinds do
  all_terms[index] = parse_terms(ARGV[cursor], ARGV[cursor + 1], ARGV[cursor + 2] == '1')
  cursor = cursor + 3
end

-- All that an add must know of its timeline: little if that is ready or leased, and more to open or push a window.
local FEW = {'end', 'own'}
local MORE = {'end', 'own', 'id', 'last', 'cool', 'iteration', 'opening', 'counted'}

-- Drop what a log holds more than once or beyond its capacity.
local function compact(held, length, terms)
  -- Needs    entries lists
  local log = logs .. held.key
  local kept = collect({}, {}, log, length)
  local left = math.min(#kept, terms.capacity)
  if #kept == length then
    call('LTRIM', log, -left, -1)
  else
    rewrite(log, kept, left, lifetime(held, terms.ttl))
  end
  if #kept > left then
    try('HINCRBY', metas .. held.key, 'dropped', #kept - left) -- what is no number is found by the claim
    try('HINCRBY', layout, 'dropped', #kept - left)
  end
end

local function append(key, terms, entry)
  local settled, due = call('ZSCORE', ready, key), nil
  if not settled then
    due = tonumber(call('ZSCORE', waiting, key))
    settled = not due and call('ZSCORE', leased, key)
  end
  local names = settled and FEW or MORE
  local fields = try('HMGET', metas .. key, unpack(names))
  if fields.err then
    return fields.err
  end
  local held = setmetatable({key = key, stored = {}}, ABSENT)
  for index, name in ipairs(names) do
    if fields[index] then
      thaw_field(held, name, fields[index])
    end
  end
  if held.problem then
    return held.problem
  end
  local flags, log = string.byte(entry), logs .. key
  if math.floor(flags / ARRIVAL) % 2 == 1 then -- fill in the time of arrival
    entry = string.sub(entry, 1, 1) .. struct.pack('>I6', now - shift) .. string.sub(entry, 8)
  end
  local length = try('RPUSH', log, entry)
  if type(length) == 'table' then
    return length.err
  end
  local changed = held.own ~= terms.own
  held.own = terms.own
  touch(held, terms.ttl)
  if length == 1 and not held.touched then
    call('PEXPIRE', log, lifetime(held, terms.ttl))
  end
  local is_ready = not settled and open_or_push(held, due, terms)
  if not settled and not is_ready then
    is_ready, length = fill(held, length, terms, due, entry)
  end
  if length > terms.capacity + math.floor(terms.capacity / 4) then
    uncount(held)
    compact(held, length, terms)
  end
  if changed or held.touched or not (settled or due) or held.counted ~= held.stored.counted then
    save(held, names)
  end
  return is_ready and 1 or 0
end

local answers = {}
while cursor <= #ARGV and scanned < SLICE do
  answers[#answers + 1] = append(ARGV[cursor], all_terms[tonumber(ARGV[cursor + 1])], ARGV[cursor + 2])
  cursor = cursor + 3
end
wake()
return answers
