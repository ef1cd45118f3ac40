package leaktest

import (
	"fmt"
	"os"
	"os/exec"
	"testing"
	"time"
)

// Main runs the tests and returns the status to exit with. It also fails when
// resources of an RDMA device (QPs, CQs, MRs, PDs, CM ids) are left, as rdma(8)
// counts them: the kernel takes them back from a process that ends, so nobody
// else would see them. With no name of a device it only runs the tests.
func Main(m *testing.M, device string) int {
	if device == "" {
		return m.Run()
	}
	before := resources(device)
	status := m.Run()
	after := resources(device)
	for end := time.Now().Add(patience); after != before && time.Now().Before(end); after = resources(device) {
		time.Sleep(20 * time.Millisecond)
	}
	if after != before {
		fmt.Fprintf(os.Stderr, "resources left behind: %sbefore: %s", after, before)
		return 1
	}
	return status
}

func resources(device string) string {
	out, err := exec.Command("rdma", "resource", "show", device).CombinedOutput()
	if err != nil {
		return fmt.Sprintf("%v: %s\n", err, out)
	}
	return string(out)
}
