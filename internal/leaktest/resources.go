package leaktest

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/rdmanet/rdmanet/ibv"
	"github.com/rdmanet/rdmanet/internal/defect"
)

// Main runs the tests and returns the exit status. It also fails if resources of an RDMA
// device (QPs, CQs, MRs, PDs, CM ids) are left, as rdma(8) counts them. The kernel frees
// the resources of a process that ends, so they would not be noticed later. Without the
// name of a device it only runs the tests.
//
// open returns the provider that the tests use, and address is one of the device's. Once
// its devices are listed, librdmacm keeps a domain for a listener. That is no leak.
func Main(m *testing.M, device, address string, open func() (ibv.Provider, error)) int {
	if device == "" {
		return m.Run()
	}
	if err := settle(address, open); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	before := resources(device)
	status := m.Run()
	after := resources(device)
	for end := time.Now().Add(patience); after != before && time.Now().Before(end); after = resources(device) {
		time.Sleep(20 * time.Millisecond)
	}
	if after != before {
		if status != 0 {
			// A test that failed may have left them for that reason.
			fmt.Fprintf(os.Stderr, "resources left by tests that failed: %sbefore: %s", after, before)
			return status
		}
		fmt.Fprintf(os.Stderr, defect.Prefix+"leak: resources left behind: %sbefore: %s", after, before)
		return 1
	}
	return status
}

func settle(address string, open func() (ibv.Provider, error)) error {
	at, err := netip.ParseAddr(address)
	if err != nil {
		return err
	}
	p, err := open()
	if err != nil {
		return err
	}
	if _, err := p.Devices(); err != nil {
		return err
	}
	l, err := p.Listen(context.Background(), netip.AddrPortFrom(at, 0), 0)
	if err != nil {
		return err
	}
	return l.Close()
}

func resources(device string) string {
	out, err := exec.Command("rdma", "resource", "show", device).CombinedOutput()
	if err != nil {
		return fmt.Sprintf("%v: %s\n", err, out)
	}
	return string(out)
}
