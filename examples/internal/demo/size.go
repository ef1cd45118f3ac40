package demo

import (
	"fmt"
	"time"
)

// Size formats n bytes in binary units, for instance "1.5 MiB".
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

// Rate formats the rate of n bytes in the time d, for instance "812.4 MiB/s".
func Rate(n int64, d time.Duration) string {
	if d <= 0 {
		return "at once"
	}
	return Size(int64(float64(n)/d.Seconds())) + "/s"
}
