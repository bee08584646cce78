-- add: append records to their logs, and open or push the windows of their timelines.
--
-- ARGV[3]   number of terms; each is three arguments, times in ms: "initial increment maximum",
--           "capacity max_size max_age ttl", and 1 if these limits are the timeline's own
-- then      for each add: key, number of its terms, entry
-- Returns   for each add: 1 if it made its timeline ready, 0 if not, or the text of its error. Shorter than the
--           request if much had to be compacted; the rest was not looked at.

local stamp = struct.pack('>i8', now * 1000)
local all_terms = {}
local cursor = 4
for index = 1, tonumber(ARGV[3]) do
  all_terms[index] = parse_terms(ARGV[cursor], ARGV[cursor + 1], ARGV[cursor + 2])
  cursor = cursor + 3
end

-- Fill in the time of arrival of an entry without a timestamp.
local function stamped(entry)
  local flags = string.byte(entry)
  if math.floor(flags / UNSTAMPED) % 2 == 0 then
    return entry
  end
  return string.char(flags - UNSTAMPED) .. stamp .. string.sub(entry, 10)
end

-- All that an add must know of its timeline: little if that is ready or leased, and more to open or push a window.
local FEW = {'end', 'own'}
local MORE = {'end', 'own', 'id', 'last', 'cool', 'iteration'}

local function glance(key, names)
  local values = try('HMGET', meta_of(key), unpack(names))
  if values.err then
    return nil, values.err
  end
  local held = setmetatable({key = key, stored = {}}, ABSENT)
  for index = 1, #names do
    local value = values[index]
    if value then
      thaw_field(held, names[index], value)
    end
  end
  return not held.problem and held or nil, held.problem
end

local function compact(held, length, terms)
  local log = log_of(held.key)
  local kept = collect({}, {}, log, length)
  local left = math.min(#kept, terms.capacity)
  if #kept == length then
    call('LTRIM', log, -left, -1)
  else
    rewrite(log, kept, left, lifetime(held, terms.ttl))
  end
  if #kept > left then
    try('HINCRBY', meta_of(held.key), 'dropped', #kept - left) -- what is no number is found by the claim
    count('dropped', #kept - left)
  end
  return left
end

local function append(key, terms, entry)
  local settled, due = call('ZSCORE', ready, key), nil
  if not settled then
    due = tonumber(call('ZSCORE', waiting, key))
    settled = not due and call('ZSCORE', leased, key)
  end
  local names = settled and FEW or MORE
  local held, problem = glance(key, names)
  if not held then
    return problem
  end
  local log = log_of(key)
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
  if changed or held.touched or not (settled or due) then
    save(held, names)
  end
  if length > terms.capacity + math.floor(terms.capacity / 4) then
    length = compact(held, length, terms)
  end
  if settled then
    return 0
  end
  -- counting reads the whole log: when it has reached the size, then after each further quarter
  local size, over = terms.max_size, length - terms.max_size
  if size > 0 and over >= 0 and over % math.max(1, math.floor(size / 4)) == 0 and not is_ready then
    is_ready = fill(held, length, terms, due)
  end
  return is_ready and 1 or 0
end

local answers = {}
while cursor <= #ARGV and scanned < SLICE do
  answers[#answers + 1] = append(ARGV[cursor], all_terms[tonumber(ARGV[cursor + 1])], stamped(ARGV[cursor + 2]))
  cursor = cursor + 3
end
finish()
return answers
