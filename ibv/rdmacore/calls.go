//go:build linux && cgo

package rdmacore

// #include "shim.h"
import "C"

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"unsafe"

	"github.com/rdmanet/rdmanet/internal/ccall"
)

// ccallEnv is the environment variable that chooses how C is called for each message:
// "auto" or empty for each device as its driver needs, "on" without a notice to the
// scheduler on all devices, "off" by cgo on all devices.
const ccallEnv = "RDMANET_CCALL"

// parseCCall returns whether the calls go around cgo on all devices, and on the devices of
// the drivers that permit it.
func parseCCall(mode string) (all, some bool, err error) {
	switch mode {
	case "", "auto":
		return false, true, nil
	case "on":
		return true, true, nil
	case "off":
		return false, false, nil
	}
	return false, false, fmt.Errorf("%s: %s=%q: must be auto, on or off", Name, ccallEnv, mode)
}

// staysOut matches the libraries of the drivers that never enter the kernel from post, poll
// and arm: the source of rdma-core up to version 64 shows that for reliable connections and
// for datagrams. These are left out:
//
//   - rxe and siw post in the kernel, and so do hfi1 and qib (ipathverbs);
//   - irdma, hns and mana ask the kernel about a queue pair that has failed, from post or
//     poll, partly with a lock held, and so does cxgb4 while the kernel has stopped doorbells;
//   - bnxt_re may wait for a register of the device without a limit;
//   - mlx4, mthca, ocrdma and qedr print some failed completions.
var staysOut = regexp.MustCompile(`^lib(mlx5|erdma|efa|ionic|vmw_pvrdma)(-rdmav[0-9]+)?\.so(\.[0-9.]+)?$`)

// debugging are the variables of the environment that make such a driver print or wait.
var debugging = [...]string{"MLX5_DEBUG_FILE", "MLX5_FREEZE_ON_ERROR_CQE", "VERBS_LOG_LEVEL"}

// callsDirectly reports whether the device's calls go around cgo.
func (d *device) callsDirectly() bool {
	all, some, err := parseCCall(os.Getenv(ccallEnv))
	if err != nil || all || !some {
		return all
	}
	for _, name := range debugging {
		if os.Getenv(name) != "" {
			return false
		}
	}
	return staysOut.MatchString(d.driver())
}

// driver returns the name of the library that has the device's driver in user space.
func (d *device) driver() string { return filepath.Base(C.GoString(C.rn_driver(d.c))) }

// call calls a function that every message needs. cgo costs more than the function, so
// drivers that do not wait are called without a notice to the scheduler.
func (d *device) call(fn, arg unsafe.Pointer) int32 {
	if d.direct {
		return ccall.Call(fn, arg)
	}
	return ccall.Cgo(fn, arg)
}

// pollCQ returns how many completions it has put into wcs, or a number below 0.
func (d *device) pollCQ(c *C.struct_rn_cq, wcs []C.struct_rn_wc) int {
	p := C.struct_rn_poll{cq: c, wcs: unsafe.SliceData(wcs), n: C.int(len(wcs))}
	return int(d.call(C.rn_poll_cq, unsafe.Pointer(&p)))
}

func (d *device) armCQ(c *C.struct_rn_cq, solicitedOnly bool) error {
	a := C.struct_rn_arm{cq: c}
	if solicitedOnly {
		a.solicited = 1
	}
	return errno(C.int(d.call(C.rn_arm_cq, unsafe.Pointer(&a))))
}

// takeEvent takes an event from the completion channel, or returns -EAGAIN. It enters the
// kernel for as long as a read of a file that does not block.
func (d *device) takeEvent(c *C.struct_rn_cq) C.int {
	return C.int(d.call(C.rn_cq_event, unsafe.Pointer(c)))
}

// postSend returns how many are posted. sges has the elements of all wrs.
func (d *device) postSend(q *C.struct_rn_qp, wrs []C.struct_rn_wr, sges *C.struct_rn_sge) (int, error) {
	return d.post(C.rn_post_send, q, wrs, sges)
}

// postRecv is as postSend.
func (d *device) postRecv(q *C.struct_rn_qp, wrs []C.struct_rn_wr, sges *C.struct_rn_sge) (int, error) {
	return d.post(C.rn_post_recv, q, wrs, sges)
}

func (d *device) post(fn unsafe.Pointer, q *C.struct_rn_qp, wrs []C.struct_rn_wr, sges *C.struct_rn_sge) (int, error) {
	p := C.struct_rn_post{qp: q, wrs: unsafe.SliceData(wrs), sges: sges, n: C.int(len(wrs))}
	err := errno(C.int(d.call(fn, unsafe.Pointer(&p))))
	return int(p.posted), err
}
