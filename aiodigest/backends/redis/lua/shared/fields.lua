-- fields: what is kept of a timeline in the hash `meta`: read, changed in a table `held`, and written back.
--
-- Needs    keys limits

local ECHO = 300000 -- ms for which a timeline without records remembers what its last outcome was answered
local NUMBERS = {
  ['end'] = 0, attempts = 0, lost = 0, iteration = 0, last = 0, cool = 0, dropped = 0, open_dropped = 0, part = 0, cut = 0,
  bound = 0, since = 0, opening = 0, next = 0, bytes = 0, max_bytes = 0, due = 0,
}
local ABSENT = {__index = NUMBERS} -- a number that is not stored is 0

local fitting = {} -- limits that were checked already: many timelines have the same

local function are_limits(value)
  if fitting[value] == nil then
    local limits = parse_limits(value)
    fitting[value] = limits.ttl and limits.capacity > 0
      and math.max(limits.ttl, limits.max_age, limits.capacity) < 1e15 or false
  end
  return fitting[value]
end

-- Return the error of a timeline that no script reads, as it would take seconds: another program has written to it.
local function too_long(length)
  return string.format('ERR it has %.0f entries in a list, where aiodigest keeps %d at the most', length, LONGEST)
end

-- Return the whole number that a text is, or nothing: another program may have written anything.
local function whole(text)
  return #text < 16 and string.find(text, '^%-?%d+$') and tonumber(text)
end

-- Take over a field if a script can reckon with it: else it would break off half-way.
local function thaw_field(held, name, value)
  if NUMBERS[name] then
    value = whole(value)
  elseif name == 'own' then
    value = are_limits(value) and value
  end
  if value then
    held[name], held.stored[name] = value, value
    return
  end
  held.problem = "ERR the field '" .. name .. "' of its meta is not of aiodigest"
end

-- Return how long the keys of a timeline live at least: until a claim has surely met and counted its end.
local function lifetime(held, ttl)
  return math.max(2 * ttl, held['end'] - now + ttl)
end

-- Renew the end of a timeline's records; set one part in 64 later than asked, so that most calls need not write it.
local function touch(held, ttl)
  if held['end'] < now + ttl then
    held['end'] = now + ttl + math.floor(ttl / 64)
    held.touched = 2 * ttl
  end
end

-- Let a timeline hold no records any more, in its log or under delivery.
local function go_idle(held)
  held['end'], held.dropped, held.own, held.idle, held.next, held.due = 0, 0, nil, true, 0, 0
  if held.needs then
    held.bytes, held.max_bytes = 0, 0
  end
end

-- Forget the ids that the log holds: it is about to be another one.
local function uncount(held)
  if held.counted then
    call('UNLINK', indexes .. held.key)
    held.counted = nil
  end
end

local changed, gone = {}, {} -- of the timeline that is saved: made once, since a call may save a hundred

-- Write those of the fields `names` that differ from what is stored, and renew the expiries that are due.
local function save(held, names)
  local stored, written, dropped = held.stored, 0, 0
  for index = 1, not (held.needs or has_mutes) and names.plain or #names do
    local name = names[index]
    local value = held[name]
    if value == 0 or value == '' then
      value = nil
    end
    if value ~= stored[name] then
      if value then
        changed[written + 1], changed[written + 2] = name, value
        written = written + 2
      else
        dropped = dropped + 1
        gone[dropped] = name
      end
    end
  end
  local meta = metas .. held.key
  if written > 0 then
    call('HSET', meta, unpack(changed, 1, written))
  end
  if dropped > 0 then
    call('HDEL', meta, unpack(gone, 1, dropped))
  end
  if held.touched then
    call('PEXPIRE', logs .. held.key, held.touched)
    call('PEXPIRE', opens .. held.key, held.touched)
    call('PEXPIRE', meta, held.touched)
    if held.counted then
      call('PEXPIRE', indexes .. held.key, held.touched)
    end
  elseif held.idle or not next(stored) then
    -- without records: as long as its cool-down, and a while for a late close to hear its answer
    call('PEXPIRE', meta, math.max(held.cool - now, 0) + ECHO)
  end
end
