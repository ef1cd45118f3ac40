package demo

import (
	"fmt"
	"time"
)

// Size writes n bytes in binary units, "1.5 MiB" for instance.
func Size(n int64) string {
	const units = "KMGTPE"
	if n < 1<<10 {
		return fmt.Sprintf("%d B", n)
	}
	size, unit := float64(n)/(1<<10), 0
	for ; size >= 1<<10; unit++ {
		size /= 1 << 10
	}
	return fmt.Sprintf("%.1f %ciB", size, units[unit])
}

// Rate writes how fast n bytes went in d, "812.4 MiB/s" for instance.
func Rate(n int64, d time.Duration) string {
	if d <= 0 {
		return "at once"
	}
	return Size(int64(float64(n)/d.Seconds())) + "/s"
}
