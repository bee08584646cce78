-- timelines: load whole timelines. Their states and transitions are those of memory/backend.py.
--
-- Needs    fields

local FIELDS = {
  'end', 'token', 'done', 'attempts', 'lost', 'iteration', 'last', 'cool', 'dropped', 'open_dropped', 'id', 'part', 'cut',
  'bound', 'frozen', 'parted', 'since', 'error', 'flush', 'own', 'counted', 'opening', 'needs', 'pass',
  'next', 'bytes', 'max_bytes', 'due', plain = 24, -- after so many, what only those have that need something
}
local KNOWN = {} -- another program may have written others, of names that `held` has for what it does not store
for _, name in ipairs(FIELDS) do
  KNOWN[name] = true
end

local function thaw(key, fields)
  local held = { -- with room for what it will hold: it would have to grow four times
    key = key, stored = {}, logged = 0, opened = 0, ['end'] = 0, attempts = 0, lost = 0, iteration = 0, last = 0, cool = 0,
    dropped = 0, open_dropped = 0, part = 0, cut = 0, since = 0,
  }
  setmetatable(held, ABSENT)
  for index = 1, #fields, 2 do
    if KNOWN[fields[index]] then
      thaw_field(held, fields[index], fields[index + 1])
    end
  end
  return held
end

-- Return what is kept of a timeline in these fields; or nil and the error of a key that cannot be read.
local function read_fields(key, fields)
  if fields.err then
    return nil, fields.err
  end
  local held = thaw(key, fields)
  return not held.problem and held or nil, held.problem
end

-- Return the fields of a timeline that are known, and no others.
local function fields_by_name(key)
  local found = try('HMGET', metas .. key, unpack(FIELDS))
  local fields = {err = found.err}
  for index, name in ipairs(FIELDS) do
    if found[index] then
      fields[#fields + 1] = name
      fields[#fields + 1] = found[index]
    end
  end
  return fields
end

-- Return what is kept of a timeline beside its entries; or nil and the error of a key that cannot be read.
local function load(key)
  local size = try('HLEN', metas .. key)
  if type(size) == 'table' then
    return nil, size.err
  end
  -- another program may have put a million there
  return read_fields(key, size > 2 * #FIELDS and fields_by_name(key) or try('HGETALL', metas .. key))
end

-- Note the lengths of both lists, so that every key of the timeline has been read before the first write.
local function with_lengths(held, problem)
  if not held then
    return nil, problem
  end
  local logged, opened = try('LLEN', logs .. held.key), try('LLEN', opens .. held.key)
  if type(logged) == 'table' or type(opened) == 'table' then
    return nil, (type(logged) == 'table' and logged or opened).err
  elseif math.max(logged, opened) > LONGEST then
    return nil, too_long(math.max(logged, opened))
  end
  held.logged, held.opened = logged, opened
  return held
end

-- Return what is kept of a timeline, with the lengths of both lists.
local function load_all(key)
  return with_lengths(load(key))
end

-- Do the same for a user who only adds, and may not run HGETALL.
local function load_by_name(key)
  return with_lengths(read_fields(key, fields_by_name(key)))
end
