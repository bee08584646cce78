-- aging: records that are too old for their digest.

-- Return whether the record of an entry is older than the digest's cut-off; one that cannot be read is not.
local function is_aged(held, entry, id)
  if held.cut <= 0 or id == entry then
    return false
  end
  local is_exact = string.byte(entry) % TRACED < ARRIVAL
  local time = is_exact and struct.unpack('>i8', entry, 2) or struct.unpack('>I6', entry, 2) * 1000
  return time < held.cut * 1000
end
