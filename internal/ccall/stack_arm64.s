//go:build linux && cgo && !race && !asan && !msan && !rdmanet_cgocall

#include "textflag.h"

// func call(fn, arg unsafe.Pointer, top uintptr) int32
//
// C keeps R19. The stack it is given is aligned to 16 bytes, as the ABI wants it.
TEXT ·call(SB), NOSPLIT, $0-28
	MOVD	fn+0(FP), R1
	MOVD	arg+8(FP), R0
	MOVD	top+16(FP), R2
	MOVD	RSP, R19
	MOVD	R2, RSP
	BL	(R1)
	MOVD	R19, RSP
	MOVW	R0, ret+24(FP)
	RET
