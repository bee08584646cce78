-- counters: what happened in a shard, counted in its layout.

local counted = {}

local function count(name, number)
  if number ~= 0 then
    counted[name] = (counted[name] or 0) + number
  end
end

local function write_counts()
  for name, number in pairs(counted) do
    try('HINCRBY', layout, name, number) -- fails where another program wrote no number; all else has been done
  end
end
